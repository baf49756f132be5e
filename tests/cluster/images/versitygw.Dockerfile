FROM scratch
COPY versitygw /versitygw
ENTRYPOINT ["/versitygw"]
