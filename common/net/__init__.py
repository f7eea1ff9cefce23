"""The network: MQTT connections, their limits and their packets."""
