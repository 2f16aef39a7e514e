"""OpenTelemetry traces: a span for each generating request, exported over OTLP. Needs the extra `otel`."""
