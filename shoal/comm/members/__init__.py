"""Who takes part: boards, membership of elastic groups, meetings."""
