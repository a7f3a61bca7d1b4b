<?php
// Both ends of the checks in php.py:
// php peer.php stream-server|socket-server|mixed-server PORT
// php peer.php stream-client|socket-client|mixed-client PORT CONNECTIONS SEED
// A mixed end is a stream; it is watched and written to as such, and the sockets extension receives.
error_reporting(E_ALL);
set_error_handler(function ($level, $text) {
    fail($text);
});

define('ADDRESS', getenv('SERVER_ADDRESS') ?: '127.0.0.1');
const PING_ROUNDS = 100;
const PING_LARGEST = 5000;
const BULK_BYTES = 2000000;
const WRITE_BYTES = 40000;
const READ_BYTES = 70000;
const PATIENCE_SECONDS = 60;

function fail($why)
{
    fwrite(STDERR, "$why\n");
    exit(1);
}

// Repeatable bytes: a key stream of the seed and a name.
function bytes($name, $size)
{
    global $seed;
    $key = hash('sha256', "$seed/$name", true);
    return openssl_encrypt(str_repeat("\0", $size), 'aes-256-ctr', $key, OPENSSL_RAW_DATA, str_repeat("\0", 16));
}

// One end of a connection, never blocking.
class End
{
    public $stream, $socket, $pending = '', $received = '', $ended = false;

    public function __construct(public $kind, $made)
    {
        if ($kind === 'socket') {
            $this->socket = $made;
            socket_set_nonblock($made);
            return;
        }
        $this->stream = $made;
        stream_set_blocking($made, false);
        if ($kind === 'mixed') {
            $this->socket = socket_import_stream($made);
        }
    }

    public function receive()
    {
        if ($this->kind === 'stream') {
            $data = fread($this->stream, READ_BYTES);
            $this->ended = $data === '' && feof($this->stream);
            $this->received .= $data;
            return;
        }
        $length = socket_recv($this->socket, $data, READ_BYTES, MSG_DONTWAIT);
        if ($length === 0) {
            $this->ended = true;
        } elseif ($length !== false) {
            $this->received .= $data;
        }
    }

    public function send()
    {
        $part = substr($this->pending, 0, WRITE_BYTES);
        $sent = $this->kind === 'socket' ? @socket_send($this->socket, $part, strlen($part), 0) : fwrite($this->stream, $part);
        $this->pending = substr($this->pending, (int) $sent);
    }

    public function half_close()
    {
        if ($this->kind === 'socket') {
            socket_shutdown($this->socket, 1);
        } else {
            stream_socket_shutdown($this->stream, STREAM_SHUT_WR);
        }
    }
}

// Waits until one of these ends can receive, or send what it has to.
function turn($kind, $ends, $listener = null)
{
    $watched = fn ($end) => $kind === 'socket' ? $end->socket : $end->stream;
    $readable = array_map($watched, array_filter($ends, fn ($end) => !$end->ended));
    $writable = array_map($watched, array_filter($ends, fn ($end) => $end->pending !== ''));
    if ($listener) {
        $readable['listener'] = $listener;
    }
    $none = null;
    $select = $kind === 'socket' ? 'socket_select' : 'stream_select';
    if ($select($readable, $writable, $none, $listener ? null : PATIENCE_SECONDS) === 0) {
        fail('nothing came for ' . PATIENCE_SECONDS . ' s');
    }
    foreach (array_intersect_key($ends, $writable) as $end) {
        $end->send();
    }
    foreach (array_intersect_key($ends, $readable) as $end) {
        $end->receive();
    }
    return isset($readable['listener']);
}

function serve($kind, $port)
{
    if ($kind === 'socket') {
        $listener = socket_create(AF_INET, SOCK_STREAM, SOL_TCP);
        socket_bind($listener, ADDRESS, $port);
        socket_listen($listener, 128);
    } else {
        $listener = stream_socket_server('tcp://' . ADDRESS . ":$port");
    }
    $ends = [];
    while (true) {
        if (turn($kind, $ends, $listener)) {
            $ends[] = new End($kind, $kind === 'socket' ? socket_accept($listener) : stream_socket_accept($listener));
        }
        foreach ($ends as $number => $end) {
            $end->pending .= $end->received;
            $end->received = '';
            if ($end->ended && $end->pending === '') {
                unset($ends[$number], $end->stream, $end->socket);
            }
        }
    }
}

function talk($kind, $port, $connections)
{
    $ends = [];
    for ($number = 0; $number < $connections; $number++) {
        if ($kind === 'socket') {
            $made = socket_create(AF_INET, SOCK_STREAM, SOL_TCP);
            socket_connect($made, ADDRESS, $port);
        } else {
            $made = stream_socket_client('tcp://' . ADDRESS . ":$port");
        }
        $ends[] = new End($kind, $made);
    }
    for ($round = 0; $round <= PING_ROUNDS; $round++) {
        if ($round === PING_ROUNDS) {
            echo "hold\n";
            fgets(STDIN);
        }
        $said = [];
        foreach ($ends as $number => $end) {
            $size = 1 + hexdec(bin2hex(bytes("$number/$round/size", 4))) % PING_LARGEST;
            $said[$number] = bytes("$number/$round", $round === PING_ROUNDS ? BULK_BYTES : $size);
            $end->pending = $said[$number];
        }
        $unheard = fn ($end, $number) => strlen($end->received) < strlen($said[$number]) && !$end->ended;
        while ($waiting = array_filter($ends, $unheard, ARRAY_FILTER_USE_BOTH)) {
            turn($kind, $waiting);
        }
        foreach ($ends as $number => $end) {
            if ($end->received !== $said[$number]) {
                fail("round $round of connection $number differs");
            }
            $end->received = '';
        }
    }
    foreach ($ends as $end) {
        $end->half_close();
        while (!$end->ended) {
            turn($kind, [$end]);
        }
        if ($end->received !== '') {
            fail('bytes after the end');
        }
    }
    echo "all equal\n";
}

[$role, $port, $connections, $seed] = array_slice($argv, 1) + [2 => 0, 3 => ''];
[$kind, $part] = explode('-', $role);
if ($part === 'server') {
    serve($kind, (int) $port);
} else {
    talk($kind, (int) $port, (int) $connections);
}
