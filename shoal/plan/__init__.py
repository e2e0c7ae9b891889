"""How long things take: schedules, steps and strategies, without a runtime."""
