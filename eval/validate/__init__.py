"""The simulator against real servers: what it predicts beside what is measured here."""
