"""MQTT brokers started by fedstrata."""
