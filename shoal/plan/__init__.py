"""How long: prices and predictions from schedules and clusters, without running anything."""
