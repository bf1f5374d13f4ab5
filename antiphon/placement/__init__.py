"""Which worker serves which experts: pure functions on arrays, called by planner, simulator and server alike."""
