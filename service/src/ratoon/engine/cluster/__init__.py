"""Where the engine and its workers run: Ray actors, their placement and their start."""
