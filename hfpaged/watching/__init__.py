"""A live line about caches, batchers and pools, for notebooks and scripts."""
