"""Servers as child processes, loads, and the clients that send them."""
