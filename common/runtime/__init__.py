"""The asyncio shell of the protocol: broker connections, one pump for each, and the work beside it."""
