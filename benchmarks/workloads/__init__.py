"""The workloads of papers about programs that call a model many times, each as a program and the plain way."""
