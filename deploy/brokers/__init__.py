"""MQTT brokers that fedstrata starts."""
