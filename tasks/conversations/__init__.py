"""Trajectories in the formats of others: reading them for `tasks.ingest`, writing them for `tasks.export`."""
