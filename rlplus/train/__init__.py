"""The trainer: what a run is (configuration, algorithm, recipe), its data, rewards, rollouts, models and loop."""
