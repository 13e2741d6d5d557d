"""The hooks on SGLang: the only code that imports it. `hooks.py` lists every one of them."""
