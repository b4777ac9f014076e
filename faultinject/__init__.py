"""Fault injection for threaded Python."""
