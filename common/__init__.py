"""What both services share: the wire, the settings base, the logging set-up. Knows neither service."""
