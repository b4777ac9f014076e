"""The threads that move whole blocks between the device and the store; they must never know the scheduler."""
