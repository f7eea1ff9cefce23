"""What several test files share, where a fixture would not do."""
