"""The processes that hold the models: what runs in one, and how the daemon starts, feeds and replaces them."""
