"""Pipeline schedules as data: the actions of each stage; built and proven."""
