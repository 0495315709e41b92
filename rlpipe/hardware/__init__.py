"""The rates of devices and their hosts: a table, measurements, and the storage of measurements."""
