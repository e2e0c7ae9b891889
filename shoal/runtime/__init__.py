"""What every process of a run stands on: its configuration, its files, its share of the cores."""
