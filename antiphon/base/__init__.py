"""Ground floor: errors, units, logging, progress. Imports nothing of ours."""
