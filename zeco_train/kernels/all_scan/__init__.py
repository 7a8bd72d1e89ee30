"""All-Scan in one launch over memory that GPUs of one NVLink domain share; what makes it right is in `protocol.py`."""
