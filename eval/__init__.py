"""Traces, replay client, baselines, simulator and report; and the demo model's training script."""
