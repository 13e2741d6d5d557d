"""SGLang on hosts without a GPU: platform, attention backend and allocator."""
