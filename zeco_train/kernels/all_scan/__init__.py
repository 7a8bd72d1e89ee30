"""All-Scan in one launch over memory shared by the GPUs of one NVLink domain; `protocol.py` has the protocol."""
