/** Sends a file to the machine. `fetch` shows no progress of a request, so this is the older interface. */
import { Refusal } from './api';

export interface Upload {
  done: Promise<{ file: string; bytes: number }>;
  stop: () => void;
}

export function upload(file: Blob, progress: (sent: number) => void): Upload {
  const request = new XMLHttpRequest();
  const done = new Promise<{ file: string; bytes: number }>((take, refuse) => {
    request.upload.onprogress = (event) => progress(event.loaded);
    request.onerror = () => refuse(new Refusal(0, { message: 'The connection ended during the upload.' }));
    request.onabort = () => refuse(new Refusal(0, { message: 'The upload was stopped.' }));
    request.onload = () => {
      let body: any = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        // The status says enough.
      }
      if (request.status === 200 && body) take(body);
      else refuse(new Refusal(request.status, body?.error ?? { message: `The server answered with HTTP status ${request.status}.` }));
    };
    request.open('POST', '/api/upload');
    request.setRequestHeader('Content-Type', 'application/octet-stream');
    request.setRequestHeader('X-Nacre', '1');
    request.send(file);
  });
  return { done, stop: () => request.abort() };
}
