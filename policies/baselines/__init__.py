"""Whole requests moved, as other systems do: what eLLM is compared with."""
