# Both commands of the README on a CPU: docker build -t verl-turnkey . && docker run --rm --shm-size=4g verl-turnkey
# The tests: docker run --rm --shm-size=4g verl-turnkey ./run_tests.sh
FROM python:3.11-slim-bookworm
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends git g++ make default-jre-headless chromium chromium-driver \
    bubblewrap \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /verl-turnkey
COPY . .
RUN bash examples/install_cpu.sh .venv examples/cpu/environments.txt examples/cpu/docs.txt
CMD ["./examples/quickstart.sh"]
