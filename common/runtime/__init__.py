"""What an agent has of its surroundings: connections, random bytes and the time of day, real or simulated."""
