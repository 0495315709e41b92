"""What a device and the machine around it can do: a table, measurements, and where these are stored."""
