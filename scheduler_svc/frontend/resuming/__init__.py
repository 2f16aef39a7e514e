"""Streamed answers that outlive the connection of their reader, and are taken up again from an event on."""
