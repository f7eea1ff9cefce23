"""The network: one MQTT connection, its shape and its bytes."""
