"""The service on Ray: its processes, where they run, and how they call one another."""
