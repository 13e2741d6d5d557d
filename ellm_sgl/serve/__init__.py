"""Command line, demo and verification."""
