"""Other engines on the same model, for `ellm-sgl bench peers`."""
