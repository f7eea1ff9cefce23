"""The asyncio endpoints of the protocol: broker connections with one pump each, and the work beside
them.
"""
