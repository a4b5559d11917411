"""The synchronous client: the asynchronous one, run on a thread of its own."""
