"""The pool on real store engines, whose servers the tests start, stop and kill on loopback (`make backends`)."""
