"""Engines as replicas of Ray Serve. The only folder that imports Ray; it needs the extra ``phloem[ray]``."""
