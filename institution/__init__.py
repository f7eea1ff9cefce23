"""The institution: a participant upward and a coordinator downward."""
