"""The report of one run or several: figures, tables and the page."""
