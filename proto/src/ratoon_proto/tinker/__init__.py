"""Messages of the Tinker wire, generated from proto/ratoon/tinker."""
