"""Connections of the local workers."""
