#!/bin/sh
# HAProxy with the haproxy.cfg beside this file. HAProxy reads files once, so it is reloaded when one
# changes: calls in progress go on. Files that it cannot use change nothing.
here=$(dirname "$0")
look() { cat "$here"/* "$(dirname "$ROUTETRACE_PROXY_PEM")"/* "$ROUTETRACE_PROXY_CA" | cksum; }

seen=$(look)
haproxy -W -db -f "$here/haproxy.cfg" &
proxy=$!
# The server drains; here is nothing to wait for.
trap 'kill $proxy $!' INT TERM USR1
while sleep 5 & wait $! && kill -0 $proxy 2>/dev/null; do
  now=$(look)
  [ "$now" = "$seen" ] || kill -USR2 $proxy
  seen=$now
done
wait $proxy
