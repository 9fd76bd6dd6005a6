"""What every floor may use: errors, events, policies, checks, and private torch names."""
