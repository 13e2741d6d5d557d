"""Observe, decide, apply: which units to evict, place and restore. No SGLang in here."""

from ellm_sgl.control.elastic import ElasticMemory, Totals

__all__ = ["ElasticMemory", "Totals"]
