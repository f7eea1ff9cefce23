"""What a run will cost, before it: seconds, bytes and memory."""
