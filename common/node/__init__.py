"""The asyncio shell: joins the sans-IO cores to a broker connection, upward (`child`) and downward (`parent`)."""
