"""The seams to SGLang: the only code that imports it. `seams.py` lists every one of them."""
