// Streams: an echo server, and a client that asks it in four ways.
//
//     node talk.js server PORT
//     node talk.js client PORT pings COUNT | bulk BYTES | connections COUNT | crowd COUNT CONNECTIONS
'use strict';
const net = require('net');

const [role, portWord, way, amountWord, crowdWord] = process.argv.slice(2);
const port = Number(portWord);
const amount = Number(amountWord);
const PING = Buffer.alloc(64, 'x');
const BLOCK = Buffer.alloc(64 << 10);
const WARM_PINGS = 1000;
// Of a crowd's connections so many are asked at a time, each time another one.
const ASKED = 16;

function connect() {
  const socket = net.connect({ port, host: '127.0.0.1' });
  socket.setNoDelay(true);
  return socket;
}

// Calls `next` each time that the bytes of one answer are there.
function onAnswers(socket, next) {
  let received = 0;
  socket.on('data', (part) => {
    for (received += part.length; received >= PING.length; received -= PING.length) next();
  });
}

function tell(began) {
  console.log(`rate ${(amount / (Number(process.hrtime.bigint() - began) / 1e9)).toFixed(1)}`);
  process.exit(0);
}

function pings() {
  const socket = connect();
  let done = -WARM_PINGS;
  let began;
  onAnswers(socket, () => {
    if (++done === 0) began = process.hrtime.bigint();
    if (done === amount) tell(began);
    socket.write(PING);
  });
  socket.write(PING);
}

function bulk() {
  const socket = connect();
  let warm = 0;
  const blocks = Math.floor(amount / BLOCK.length);
  onAnswers(socket, () => {
    if (++warm < WARM_PINGS) return socket.write(PING);
    socket.removeAllListeners('data');
    const began = process.hrtime.bigint();
    let left = blocks * BLOCK.length;
    socket.on('data', (part) => {
      left -= part.length;
      if (left === 0) tell(began);
    });
    let sent = 0;
    const send = () => {
      while (sent < blocks) {
        sent++;
        if (!socket.write(BLOCK)) return socket.once('drain', send);
      }
    };
    send();
  });
  socket.write(PING);
}

function connections() {
  const began = process.hrtime.bigint();
  let done = 0;
  const one = () => {
    const socket = connect();
    onAnswers(socket, () => socket.end());
    socket.on('close', () => (++done === amount ? tell(began) : one()));
    socket.write(PING);
  };
  one();
}

function crowd() {
  const sockets = Array.from({ length: Number(crowdWord) }, connect);
  // Each is asked first by itself: a server accepts them all before the clock starts.
  let done = -WARM_PINGS - sockets.length;
  let began;
  const ask = () => sockets[Math.floor(Math.random() * sockets.length)].write(PING);
  sockets.forEach((socket) => {
    onAnswers(socket, () => {
      if (++done === 0) began = process.hrtime.bigint();
      if (done === amount) tell(began);
      if (done > -WARM_PINGS - ASKED) ask();
    });
    socket.write(PING);
  });
}

if (role === 'server') {
  const server = net.createServer((socket) => {
    socket.setNoDelay(true);
    socket.on('error', () => socket.destroy());
    socket.pipe(socket);
  });
  server.listen(port, '127.0.0.1');
} else {
  ({ pings, bulk, connections, crowd })[way]();
}
